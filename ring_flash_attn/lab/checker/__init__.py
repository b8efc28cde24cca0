"""What checks the learner's files: `run.py` is the process, the other files are by subject.

Cases and the usual mistakes of a subject are in one file: each mistake in words, and what a result
looks like after it, in fp64 and a few lines. A wrong result that agrees with one names the mistake.
"""
