"""`safe-rope scan`: finds source whose positions a lower dtype can round. Imports the standard library only."""
