"""Floor 3: one outside world each: the Hub, evaluation, the terminal."""
