package mutants

import (
	"bytes"
	"context"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// unseenPair is a wrong pair, and the rules that it breaks.
type unseenPair struct {
	name   string
	faults pdFaults
	rules  []string
}

// unseenPairs are wrong pairs of one class, which one case finds. Their leases are long, so that no history waits for the end of one.
func unseenPairs(class, caseID string, pairs []unseenPair) (out []Unseen) {
	for _, p := range pairs {
		m := pdMutant(p.name, caseID, p.faults)
		m.Config = `{"lease_ms":60000}`
		out = append(out, Unseen{Class: class, Rules: p.rules, Mutant: m})
	}
	return out
}

// readFaults are about calls of a load with another shape that no case makes: in any order, many, cancelled, or by several consumers.
func readFaults() []Unseen {
	return unseenPairs(shapes, "random-reshape", []unseenPair{
		{"a consumer that takes all producers for cut as the first", pdFaults{oneShape: true}, []string{"RESHAPE-03"}},
		{"a consumer that goes on where its last call has ended", pdFaults{goesOn: true}, []string{"RESHAPE-03"}},
		{"a consumer that ends the loads which it has begun when it closes", pdFaults{endsOnClose: true}, []string{"RESHAPE-03", "RESHAPE-06"}},
		{"a producer that counts 24 calls of a load", pdFaults{manyCalls: true}, []string{"RESHAPE-03", "RESHAPE-06"}},
		{"a consumer that ends a load with a call which was cancelled", pdFaults{endsCut: true}, []string{"RESHAPE-03", "RESHAPE-06"}},
	})
}

// pdManyCalls is after how many calls a load is over, for a fault.
const pdManyCalls = 24

// pdReader is what a consumer remembers for a fault.
type pdReader struct {
	first *pdTicket           // of the first producer
	ends  map[pdReading]int   // the block behind the last that was read
	begun map[string]pdTicket // by their secrets
}

// pdReading is what is read of a hold at one rank.
type pdReading struct {
	secret string
	rank   int
}

// otherShape reports whether a fault takes a producer for one that it cannot read.
func (n *pdNode) otherShape(from *pdTicket) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.reader.first == nil {
		n.reader.first = from
	}
	return n.oneShape && (n.reader.first.Size != from.Size || n.reader.first.World != from.World)
}

// goOn is the first block that a call reads: for a fault the one behind the last call's, unless it begins with the first of all.
func (n *pdNode) goOn(from *pdTicket, rank, first, blocks int) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.reader.ends == nil {
		n.reader.ends, n.reader.begun = map[pdReading]int{}, map[string]pdTicket{}
	}
	if n.endsOnClose {
		n.reader.begun[string(from.Secret)] = *from
	}
	if !n.goesOn {
		return first
	}
	at := pdReading{string(from.Secret), rank}
	if end, known := n.reader.ends[at]; known && first > 0 {
		first = end
	}
	n.reader.ends[at] = first + blocks
	return first
}

// endRead ends the loads that have begun, for a fault.
func (n *pdNode) endRead() {
	n.mu.Lock()
	begun := n.reader.begun
	n.reader.begun = map[string]pdTicket{}
	n.mu.Unlock()
	for _, from := range begun {
		_ = n.tellEnd(&from)
	}
}

// tellEnd says that all of a hold has been read by engines of another shape.
func (n *pdNode) tellEnd(from *pdTicket) error {
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	c, err := n.dial(ctx, from)
	if err != nil {
		return err
	}
	defer c.close()
	_, err = c.ask(ctx, pdQuestion{Done: true, Reshaped: true, Last: true})
	return err
}

// answerTurnFaults are about answers that no case has: of conversations of several turns, with partial blocks, on two ranks.
func answerTurnFaults() []Unseen {
	tail := unseenPairs(turns, "random-turns", []unseenPair{
		{"an engine that loads from the first block on where the last is partial", pdFaults{tailFrom: true}, []string{"TURN-04", "TURN-05"}},
	})
	return append(unseenPairs(turns, "random-turns", []unseenPair{
		{"an engine that gives up an answer whose first slot is reused", pdFaults{firstGone: true}, []string{"TURN-05"}},
		{"an engine that ends an answer when the conversation's next is there", pdFaults{endsTurn: true}, []string{"TURN-04", "TURN-05"}},
		{"an engine whose second rank loads from the first block on", pdFaults{rankFrom: true}, []string{"TURN-04", "TURN-05"}},
	}), tail[0].also("pd-part"))
}

// endTurn notes how an answer begins, and ends earlier ones that begin as it does: for faults. The caller holds mu.
func (n *pdNode) endTurn(h *pdHold) {
	first := h.ended.Blocks[0]
	if kv := n.caches[0]; n.firstGone && h.ended.Weak && kv != nil {
		if spans, err := kv.Spans(first); err == nil {
			h.begins = slices.Concat(spans...)
		}
	}
	for id, old := range n.holds {
		if n.endsTurn && h.ended.Weak && old.ended.Weak && old.ended.Blocks[0].Key == first.Key {
			delete(n.holds, id)
		}
	}
}

// beginsAnew reports whether the first slot of an answer has another block by now. The caller holds mu.
func (n *pdNode) beginsAnew(h *pdHold) bool {
	kv := n.caches[0]
	if kv == nil {
		return false // the engine is closing
	}
	spans, err := kv.Spans(h.ended.Blocks[0])
	return err == nil && h.begins != nil && !bytes.Equal(h.begins, slices.Concat(spans...))
}

// forgotten is how many blocks before the first of a load a fault forgets.
func (n *pdNode) forgotten(t *connector.Transfer, rank int) int {
	partial := slices.ContainsFunc(t.Blocks, func(b connector.Block) bool { return b.Key == connector.BlockKey{} })
	if n.tailFrom && partial || n.rankFrom && rank > 0 {
		return t.From / pdBlockTokens
	}
	return 0
}
