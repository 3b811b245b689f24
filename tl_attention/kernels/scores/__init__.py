"""What changes or hides a score: softcap, ALiBi, functions of the user, masks, dropout."""
