"""Options of other servers and what they mean here."""
