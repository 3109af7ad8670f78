"""Screens compose widgets and route events between them and the controller; the widgets hold what they show."""
