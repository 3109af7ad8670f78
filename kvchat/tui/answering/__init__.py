"""The answer in progress: questions that wait for it, how much of it is drawn and when, thoughts."""
