"""The only importer of torch's private modules; each use has a contract test."""
