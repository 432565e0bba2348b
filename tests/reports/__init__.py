"""What users reported about mixed precision, each report as a test."""
