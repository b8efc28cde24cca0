"""From a call's arguments to its result: checks, the plan, and what runs it."""
