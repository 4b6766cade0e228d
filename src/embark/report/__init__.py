"""What a run was and how it went: reads its record, writes it as one file, compares several. May import diagnose and
below."""
