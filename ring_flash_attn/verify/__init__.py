"""What `rfa verify` is made of: cases, right answers, calls on the ranks, errors, report."""
