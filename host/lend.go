package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/mac"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/tracker"
)

// saveLent saves the blocks of a move without the plugin; false: it has to be asked for all of them.
func (h *Host) saveLent(ctx context.Context, r *rank, a *tracker.Move) bool {
	if h.info.Lossy {
		return false
	}
	over, wrong := h.place.save(ctx, r, a.Rank, a.Transfer)
	if wrong != nil {
		h.violation("placement: " + wrong.Error())
	}
	if over {
		h.metrics.placedSaved.Add(float64(len(a.Transfer.Blocks)))
	}
	return over
}

// save writes the blocks of a save into slots that the plugin has lent ahead; false if it has to be asked for all of them: there are
// too few slots, or anything is in doubt (rule PLACE-35). The error says that no honest plugin lends such slots.
func (p *placement) save(ctx context.Context, r *rank, number int, t *connector.Transfer) (over bool, wrong error) {
	if p == nil || t.Replace || len(t.Ticket)+len(t.Extra) > 0 || len(t.Blocks) == 0 || !p.enter() {
		return false, nil
	}
	defer p.leave()
	if !p.writers.TryRLock() { // the next life opens
		return false, nil
	}
	defer p.writers.RUnlock()
	if p.pools[number].never(len(t.Blocks)) {
		return false, nil
	}
	keys := make([]connector.StoreKey, len(t.Blocks))
	for i, b := range t.Blocks {
		if b.Key == (connector.BlockKey{}) {
			return false, nil
		}
		keys[i] = p.key(b.Key, b.Group, number)
	}
	maker, err := r.hasher.Maker()
	if err != nil || p.anyKnown(keys) {
		return false, nil // the save by message fails with it
	}
	loans, round := p.pools[number].take(len(keys))
	if loans == nil {
		return false, nil
	}
	writes := make([]lentWrite, len(keys))
	for i := range writes {
		writes[i] = lentWrite{loan: loans[i], block: t.Blocks[i], key: keys[i], tenant: t.Tenant, empty: true}
	}
	all := r.shareUntil(ctx, len(writes), func(i int) { p.write(r, &maker, &writes[i]) })
	written, empty, broken, wrong := ended(writes)
	p.pools[number].put(len(writes), round, written, empty)
	p.pools[number].giveBack(broken)
	return all && len(written) == len(writes), wrong
}

// lentWrite is the write of one block into a lent slot.
type lentWrite struct {
	loan   place.Loan
	block  connector.Block
	key    connector.StoreKey
	tenant uint64
	empty  bool // the slot is as it was
	err    error
}

// ended says what has become of lent slots: blocks were written there, and the slots are their IDs; or they are as they were, and of some the
// memory is broken. The error says that no honest plugin lends such slots.
func ended(writes []lentWrite) (written []connector.Block, empty, broken []place.Loan, wrong error) {
	for i := range writes {
		w := &writes[i]
		switch refused, is := errors.AsType[*place.RefusalError](w.err); {
		case w.empty && errors.Is(w.err, shm.ErrFault):
			broken = append(broken, w.loan)
		case w.empty:
			empty = append(empty, w.loan)
		case w.err == nil:
			written = append(written, connector.Block{Key: w.block.Key, Group: w.block.Group, ID: connector.BlockID(w.loan.Slot)})
		case is && refused.Fault():
			wrong = refused
		}
	}
	return written, empty, broken, wrong
}

// anyKnown says whether some of the keys are those of resident blocks: what becomes of them is the plugin's to say.
func (p *placement) anyKnown(keys []connector.StoreKey) (known bool) {
	now := time.Now().UnixMilli()
	err := shm.Guard(func() error {
		for i := range keys {
			if known = p.host.Run(keys[i:i+1], now) > 0; known {
				return nil
			}
		}
		return nil
	})
	return known || err != nil
}

// write copies one block with its digests into a lent slot and makes it READY. The digests are those of what was read in the cache, so what
// else happens to the slot is found when the block is loaded.
func (p *placement) write(r *rank, maker *digest.Maker, w *lentWrite) {
	w.err = shm.Guard(func() error {
		part := place.Part{Key: w.key, Length: uint32(p.layout.BlockBytes(w.block.Group)), Group: w.block.Group}
		save, err := p.host.Claim(w.loan, part, w.tenant)
		if err != nil {
			w.empty = !errors.Is(err, place.ErrRefused)
			return err
		}
		defer save.Drop()
		defer func() { w.empty = save.Lent() }() // also if the memory is gone
		fault.Crash("host.lent.claimed")
		to := digest.Slot{KV: p.kv, ID: connector.BlockID(w.loan.Slot)}
		if err := maker.CopyOut(r.kv, w.block, r.kv.Segments(w.block.Group), to, mac.NonTemporal); err != nil {
			return err
		}
		fault.Crash("host.lent.copied")
		_, err = save.Publish(0)
		fault.Crash("host.lent.ready")
		return err
	})
}

// voidLoans gives back what the plugin has lent.
func (p *placement) voidLoans() {
	for _, pool := range p.pools {
		pool.void()
	}
}

// asks says whether the plugin may be asked, and has resets wait for that. During one what it lends is void, and it may answer only after the
// reset, whose end wakes whoever asks.
func (p *placement) asks(pool *pool) bool {
	pool.busy <- struct{}{}
	if p.paused() {
		<-pool.busy
		return false
	}
	return true
}

// quiet waits until nobody asks the plugin for slots, and while it is paused nobody does again.
func (p *placement) quiet(ctx context.Context) error {
	if p == nil {
		return nil
	}
	for _, pool := range p.pools {
		select {
		case pool.busy <- struct{}{}:
			<-pool.busy
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// borrow keeps slots lent to a rank as long as the generation lives, and tells the plugin what was written there.
func (g *generation) borrow(life context.Context, number int, w connector.Lender) {
	p := g.h.place.pools[number]
	looks := time.NewTicker(idleAfter)
	defer looks.Stop()
	for p.wait(life, looks.C) && life.Err() == nil {
		if !g.h.place.asks(p) {
			continue
		}
		enough, err := g.h.lend(life, number, w)
		<-p.busy
		switch {
		case life.Err() != nil:
		case err == nil && !enough: // all slots are pinned: no call for each save beside it
			pause(life, tellWithin)
		case err == nil:
		case errors.Is(err, plugin.ErrLost), errors.Is(err, plugin.ErrUnanswered):
			g.down(fmt.Errorf("lent slots: %w", err))
			return
		default:
			pause(life, slowestRetry)
		}
	}
}

// lend makes one call. enough: as many slots were lent as were wanted.
func (h *Host) lend(life context.Context, number int, w connector.Lender) (enough bool, err error) {
	over := h.place.call(h.ranks[number])
	p := h.place.pools[number]
	ctx, cancel := context.WithTimeout(life, h.cfg.Settings.Deadlines.Save+h.cfg.Settings.Deadlines.Grace)
	defer cancel()
	l, round := p.ask()
	if p.hears() {
		l.Used = h.place.takeUsed()
	}
	var loan *connector.Loan
	if err = fault.Point("host.lend"); err == nil {
		loan, err = w.Lend(ctx, &l)
	}
	if err != nil {
		p.unheard(&l)
		return false, err
	}
	fault.Crash("host.lend.answered")
	h.learn(loan.Placed, len(l.Written))
	over(&err) // it has named what answers before could not
	if wrong := p.answered(round, l.Want, loan); wrong != nil {
		h.violation("placement: " + wrong.Error())
	}
	return len(loan.Slots) >= l.Want, nil
}
