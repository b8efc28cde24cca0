"""What `rfa verify` is made of: calls, expected results, errors, report."""
