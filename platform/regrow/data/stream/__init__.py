"""The token stream: one actor and a Ray Data Dataset produce windows ahead of training, for any world size.

    TokenStream (actor, outlives worker groups)              ranks (any number, new ones at every resize)
    tickets -> [ Ray Data: ticket -> window -> blocks ]  ->  get(window, blocks) -> references to blocks of slices

Where a node has several ranks, a `NodeFetcher` asks for all of them: one call a node and window.

What a rank receives is checked against `Order`, row by row; whatever the stream cannot deliver the rank reads from the
shards itself. So the stream decides how fast data comes, never which.

The Dataset's source is a task that asks the actor which windows to produce next ("tickets"). That makes three things
free that Ray Data has no setting for: it cannot run ahead (its own backpressure bounds bytes, and spins a core while it
holds), it starts in the same time however long the run is (a source with a block per window took 14 ms for each), and
a rollback is another ticket, not another Dataset. Ray Data keeps some 1 kB for each block until its Dataset ends, so
after `actor.DATASET_BLOCKS` another one goes on: it starts while the windows ahead of training last. Ray is imported
here, and nowhere else in `data` but in `distribute`.

`actor`: what is kept and asked for, its start and its end; `dataset`: Ray Data, windows as Arrow; `client`: a rank's
batches.
"""
