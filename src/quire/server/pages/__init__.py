"""The web pages: files built from web/, sent as they are."""
