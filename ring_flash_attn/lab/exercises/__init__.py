"""What the learner fills in; `rfa lab start` copies these files."""
