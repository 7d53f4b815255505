"""`safe-rope scan`: finds source whose positions a lower dtype can round. Standard library only."""
