"""What people see: tables in the terminal, HTML reports, traces and pictures."""
