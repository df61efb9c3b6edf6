"""One file per chapter topic: its questions, its checks, its feedback by misconception."""
