"""Members trained together: one program, its width, its windows, its record."""
