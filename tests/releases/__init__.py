"""What each released version left behind, which every later version reads."""
