"""Commands that describe an installation: their full forms; core has short ones."""
