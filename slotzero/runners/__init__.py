"""What flows in and out of each kind of pass: specs for the one class that runs them."""
