"""Carrying out a bucket plan in backwards.

    arrivals      which gradients are there                   (counted in Rust)
    memory        where they are gathered, and handed back
    last_words    what ranks tell each other with the last bucket
    sending       what is ready is sent, in the plan's order; hooked_sending: by a communication hook
    order         the order in which gradients have arrived, agreed on by all ranks
    rounds        backwards inside `join`
    participation whether and how much a rank takes part, as the others do
    callbacks     what autograd calls
    reducer       puts them together: the course of a backward

What the parts have in common of where a rank stands is its `progress`.
"""
