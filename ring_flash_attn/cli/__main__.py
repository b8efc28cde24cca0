"""`python -m ring_flash_attn.cli` is `rfa`."""

from . import main

if __name__ == "__main__":
    main()
