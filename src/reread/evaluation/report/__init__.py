"""`reread report`: one HTML file from a folder of results."""
