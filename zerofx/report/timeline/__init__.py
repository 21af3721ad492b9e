"""One step as a picture: a plain record of when things happen and what is in memory, drawn.

``recording`` makes a ``record`` of a program; all else reads records alone, from files if need be.
"""
