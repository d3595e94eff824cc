"""The papers' tables and figures, one file each, named like its experiment."""
