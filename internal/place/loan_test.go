package place

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// lend has the plugin lend a slot.
func (r *shelfRig) lend(s Slot) (Loan, Word) {
	l := Loan{Slot: s, Serial: r.shelf.Draw(1)}
	return l, r.shelf.Lend(s)
}

func partOf(n byte) Part { return Part{Key: connector.StoreKey{n}, Length: 1000} }

// saveLent is what a host does with a lent slot.
func (r *shelfRig) saveLent(l Loan, n byte) {
	s, err := r.host.Claim(l, partOf(n), 0)
	require.NoError(r, err)
	copy(s.Bytes(0), bytes.Repeat([]byte{n}, 1000))
	done, err := s.Publish(0)
	require.NoError(r, err)
	require.True(r, done)
	require.False(r, s.Lent())
}

// Rules PLACE-35 and PLACE-32: what the host writes into a lent slot is resident at once, and the plugin finds it there.
func TestLoan(t *testing.T) {
	r := newShelfRig(t)
	loan, word := r.lend(3)
	_, over, _ := r.shelf.Written(3, word, loan.Serial)
	require.False(t, over)
	s, err := r.host.Claim(loan, partOf(1), 5)
	require.NoError(t, err)
	require.True(t, s.Lent())
	_, err = r.read(1)
	require.ErrorIs(t, err, ErrMiss, "it is being written")
	_, over, _ = r.shelf.Written(3, word, loan.Serial)
	require.False(t, over)
	_, err = r.host.Claim(loan, partOf(2), 0)
	require.Equal(t, &RefusalError{3, LentTwice}, err)
	other, _ := r.lend(4)
	_, err = r.host.Claim(other, partOf(1), 0)
	require.ErrorIs(t, err, ErrSaving, "the same block is being saved")
	copy(s.Bytes(0), bytes.Repeat([]byte{1}, 1000))
	done, err := s.Publish(0)
	require.NoError(t, err)
	require.True(t, done)
	b, err := r.read(1)
	require.NoError(t, err)
	require.Equal(t, bytes.Repeat([]byte{1}, 1000), b)
	h, over, ok := r.shelf.Written(3, word, loan.Serial)
	require.True(t, over && ok)
	require.Equal(t, Header{Serial: loan.Serial, Key: connector.StoreKey{1}, Length: 1000, Parts: 1, Lead: 3, Tenant: 5, Epoch: 1}, h)
	r.shelf.Back(3, word)
	_, err = r.read(1)
	require.NoError(t, err, "what was written is not taken back")
	_, err = r.host.Claim(loan, partOf(2), 0)
	require.Equal(t, &RefusalError{3, NotLent}, err)
	r.shelf.Retire(3)
	_, err = r.read(1)
	require.ErrorIs(t, err, ErrMiss)
}

// Rule PLACE-13: what the host writes into a lent slot is resident if what was written later under its key has been given up; otherwise that
// is, and the save is acknowledged only if that is the same block.
func TestLoanMeetsALaterBlock(t *testing.T) {
	for name, c := range map[string]struct {
		later  Header
		then   func(r *shelfRig)
		done   bool
		err    error
		slot   Slot // that has the block
		wanted error
	}{
		"given up":         {then: func(r *shelfRig) { r.shelf.Retire(0) }, done: true, slot: 3},
		"there":            {done: true},
		"there, until":     {later: Header{Expires: 9}, err: ErrGone},
		"of another group": {later: Header{Group: 1}, err: ErrGone},
		"damaged": {
			then: func(r *shelfRig) { r.arena.Store(r.g.wordAt(0)+8, 7) },
			err:  &RefusalError{0, HeaderLies}, wanted: ErrMiss,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newShelfRig(t)
			loan, _ := r.lend(3)
			s, err := r.host.Claim(loan, partOf(1), 0)
			require.NoError(t, err)
			r.shelf.Begin(0)
			c.later.Key, c.later.Length = connector.StoreKey{1}, 1000
			r.shelf.Publish(0, &c.later) // its serial is higher
			require.NoError(t, r.host.Notice(&Notice{Slots: []Slot{0}}, 0))
			if c.then != nil {
				c.then(r)
			}
			done, err := s.Publish(0)
			require.Equal(t, c.done, done)
			require.Equal(t, c.err, err)
			require.False(t, s.Lent(), "it is READY")
			s.Drop()
			refs, err := r.host.Find([]connector.StoreKey{{1}}, 0)
			require.ErrorIs(t, err, c.wanted)
			if err == nil {
				require.Equal(t, c.slot, refs[0].Slot)
			}
			again, _ := r.lend(5)
			s, err = r.host.Claim(again, partOf(1), 0)
			require.NoError(t, err, "the save is over")
			s.Drop()
		})
	}
}

// Rule PLACE-33: a slot whose save was given up is lent as it was, until it is given back.
func TestLoanGivenBack(t *testing.T) {
	r := newShelfRig(t)
	loan, word := r.lend(2)
	s, err := r.host.Claim(loan, partOf(1), 0)
	require.NoError(t, err)
	copy(s.Bytes(0), "half")
	s.Drop()
	require.True(t, s.Lent())
	_, err = s.Publish(0)
	require.ErrorIs(t, err, ErrVoid)
	_, over, _ := r.shelf.Written(2, word, loan.Serial)
	require.False(t, over)
	r.saveLent(loan, 2) // another save takes it
	again, word := r.lend(5)
	r.shelf.Back(5, word)
	require.Equal(t, Free, Word(r.arena.Load(r.g.wordAt(5))).State())
	_, err = r.host.Claim(again, partOf(3), 0)
	require.Equal(t, &RefusalError{5, NotLent}, err)
	later, _ := r.lend(5)
	r.shelf.Back(5, word)
	r.saveLent(later, 3) // what was given back before is another use
}

// Rule PLACE-31: what the host refuses, and that it writes nothing there.
func TestRefusedLoans(t *testing.T) {
	r := newShelfRig(t)
	old, _ := r.lend(1)
	r.open()
	r.write(0, 9)
	require.NoError(t, r.host.Notice(&Notice{Slots: []Slot{0}}, 0))
	good, _ := r.lend(6)
	before := r.arena.Bytes(0, r.arena.Size())
	want := bytes.Clone(before)
	for name, c := range map[string]struct {
		loan Loan
		why  Reason
	}{
		"beyond the last":                  {Loan{8, good.Serial}, OutOfRange},
		"far beyond":                       {Loan{1<<32 - 1, good.Serial}, OutOfRange},
		"a free slot":                      {Loan{7, good.Serial}, NotLent},
		"a slot that holds a block":        {Loan{0, good.Serial}, NotLent},
		"a serial that nobody has drawn":   {Loan{6, 1 << 40}, SerialAhead},
		"the serial of a former life":      {Loan{6, old.Serial}, SerialPast},
		"no serial":                        {Loan{6, 0}, SerialPast},
		"a slot that a former life lent":   {Loan{1, good.Serial}, NotLent},
		"a slot of a former life, and all": {old, SerialPast},
	} {
		_, err := r.host.Claim(c.loan, partOf(3), 0)
		require.Equal(t, &RefusalError{c.loan.Slot, c.why}, err, name)
		require.True(t, (&RefusalError{Reason: c.why}).Fault())
	}
	_, err := r.host.Claim(good, Part{Key: connector.StoreKey{3}, Length: 1001}, 0)
	require.ErrorIs(t, err, ErrImpossible)
	require.True(t, bytes.Equal(want, before), "nothing was written")
	_, err = r.read(9)
	require.NoError(t, err, "what was there is still there")

	s, err := r.host.Claim(good, partOf(3), 0)
	require.NoError(t, err)
	r.shelf.Begin(6) // the plugin lied, or takes it back while it is lent
	_, err = s.Publish(0)
	require.Equal(t, &RefusalError{6, WordChanged}, err)
	require.False(t, s.Lent(), "nobody gives it back or uses it again")
	s.Drop()
	_, err = r.read(3)
	require.ErrorIs(t, err, ErrMiss)
	r.host.Died()
	_, err = r.host.Claim(good, partOf(4), 0)
	require.ErrorIs(t, err, ErrVoid)
}

// Rule PLACE-12: what was begun before everything was forgotten is not made READY.
func TestLoanMeetsForget(t *testing.T) {
	r := newShelfRig(t)
	loan, word := r.lend(2)
	s, err := r.host.Claim(loan, partOf(1), 0)
	require.NoError(t, err)
	r.host.Forget()
	_, err = s.Publish(0)
	require.ErrorIs(t, err, ErrReset)
	s.Drop()
	require.True(t, s.Lent())
	_, over, _ := r.shelf.Written(2, word, loan.Serial)
	require.False(t, over)
	_, err = r.read(1)
	require.ErrorIs(t, err, ErrMiss)
}

// Rules PLACE-06 and PLACE-07: the next life keeps what was written, also when the life before never heard of it, and frees what is lent,
// once nobody writes there any more.
func TestLoansRecover(t *testing.T) {
	r := newShelfRig(t)
	var loans []Loan
	for s := range Slot(4) {
		l, _ := r.lend(s)
		loans = append(loans, l)
	}
	r.saveLent(loans[0], 1)
	s, err := r.host.Claim(loans[1], partOf(2), 0)
	require.NoError(t, err)
	r.host.Died()
	_, err = r.host.Reopen()
	require.ErrorIs(t, err, ErrWriting)
	copy(s.Bytes(0), bytes.Repeat([]byte{2}, 1000))
	_, err = s.Publish(0)
	require.NoError(t, err)
	found, torn := r.open()
	require.Zero(t, torn, "to be lent is no damage")
	require.Len(t, found, 2)
	require.Equal(t, []Slot{0, 1}, []Slot{found[0].Slot, found[1].Slot})
	for s := range Slot(8) {
		state := Free
		if s < 2 {
			state = Ready
		}
		require.Equal(t, state, Word(r.arena.Load(r.g.wordAt(s))).State(), "slot %d", s)
	}
	for n := range byte(2) {
		_, err := r.read(n + 1)
		require.NoError(t, err)
	}
}

// A plugin does not keep what is not what it has lent the slot for.
func TestWrittenIsLookedAt(t *testing.T) {
	r := newShelfRig(t)
	loan, word := r.lend(1)
	r.saveLent(loan, 1)
	_, over, ok := r.shelf.Written(1, word, loan.Serial+1)
	require.True(t, over)
	require.False(t, ok, "another serial")
	_, _, ok = r.shelf.Written(1, word.next(Lent), loan.Serial)
	require.False(t, ok, "another use")
	r.arena.Store(r.g.wordAt(1)+16, 7)
	_, over, ok = r.shelf.Written(1, word, loan.Serial)
	require.True(t, over)
	require.False(t, ok, "a damaged header")
}
