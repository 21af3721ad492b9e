"""The program's language: operators, parameters, and questions about a graph."""
