"""What each way to serve some recorded traffic would give, in virtual time, and the settings to choose."""
