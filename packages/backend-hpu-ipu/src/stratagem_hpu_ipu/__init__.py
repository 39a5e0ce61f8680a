"""Stratagem's backend for Gaudi and Graphcore; its plugin modules say what it offers."""
