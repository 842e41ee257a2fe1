"""What every shim needs: the program kvport and its agent, found, started, heard and, when it dies, fenced."""
