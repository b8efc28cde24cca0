"""Parts of `rfa ring`: what is asked for, running it, and the tables."""
