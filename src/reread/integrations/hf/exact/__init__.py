"""Mode "exact": sparse steps draft, dense passes verify, rows advance each on their own."""
