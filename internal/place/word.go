package place

import "fmt"

// State is what a slot is used for.
type State uint8

// The states of a slot. Any other value is damage.
const (
	Free    State = 0
	Lent    State = 1 // the host may write it
	Filling State = 2 // the plugin writes it
	Ready   State = 3 // it holds a part
	Retired State = 4 // its part is given up, and a reader may still be at it
)

// String is the state as the specification writes it.
func (s State) String() string {
	if names := [...]string{"FREE", "LENT", "FILLING", "READY", "RETIRED"}; int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// Word is the first word of a slot's header: a generation, which differs each time the slot gets another use, and the
// state. Both are one word, so nobody sees one without the other. Generations are compared for equality only.
type Word uint64

// NewWord is the word of a state in a generation.
func NewWord(generation uint64, s State) Word { return Word(generation<<8 | uint64(s)) }

// State is what the slot is used for.
func (w Word) State() State { return State(w) }

// Generation counts the uses of the slot, modulo 2^56.
func (w Word) Generation() uint64 { return uint64(w) >> 8 }

// next is the word of another state in the next generation.
func (w Word) next(s State) Word { return NewWord(w.Generation()+1, s) }

// as is the word of another state in this generation.
func (w Word) as(s State) Word { return NewWord(w.Generation(), s) }
