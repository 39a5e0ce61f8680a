"""The torch-native backend: a plugin like any other, found through core's own entry point."""
