"""What others have published of their libraries, and what the simulator says of it."""
