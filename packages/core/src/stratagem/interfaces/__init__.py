"""The interfaces that backends implement and front ends call."""
