"""What a run will take: bytes, time and money, before it is paid for. Pure functions; nothing here knows torch."""
