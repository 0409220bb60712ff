"""Examples: rows of files and of the Hub, as text and labels. Knows no tokenizer, task or model."""
