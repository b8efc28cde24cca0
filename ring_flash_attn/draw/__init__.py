"""What `rfa draw` is made of: schedules, as text and as SVG."""
