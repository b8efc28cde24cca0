"""The soak test: minutes of random calls, lost ranks and ever new packs; `make soak`."""
