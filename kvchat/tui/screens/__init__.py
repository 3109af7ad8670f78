"""Screens compose widgets and route events; what is shown belongs to the widgets."""
