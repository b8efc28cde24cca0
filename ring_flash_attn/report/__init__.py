"""What `rfa report` is made of: files as plain data, and the page that shows them."""
