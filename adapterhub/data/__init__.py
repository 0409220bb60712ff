"""Examples (texts and labels) from files and the Hub; independent of tokenizers and tasks."""
