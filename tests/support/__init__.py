"""What tests share: budgets, stored arrays, scripts in processes of their own."""
