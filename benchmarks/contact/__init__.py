"""The sections of first_contact.py, what runs them, and what is written about them."""
