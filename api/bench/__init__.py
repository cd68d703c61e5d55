"""Speed, as ratios of two things measured by turns in one run: machines differ, and so do minutes."""
