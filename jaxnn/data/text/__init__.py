"""Text as data: texts to be classified, and running text whose next token is to be predicted."""
