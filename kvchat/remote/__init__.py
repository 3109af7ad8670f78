"""The client of other servers: it knows them apart, talks to them and reads their own figures, without torch."""
