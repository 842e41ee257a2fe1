package placement

// Mutant is a way to be wrong.
type Mutant uint8

// The mutants.
const (
	Sound             Mutant = iota // no mutant
	LookBeforePin                   // a reader looks at the word, and pins then
	RetireAfterLook                 // the plugin looks at pins, and retires then
	RetireSkipped                   // the plugin frees what nobody has pinned, without retiring it
	PinsIgnored                     // the plugin frees what it has retired, whoever reads it
	PinsForgotten                   // the next life frees what readers still have pinned
	NoSecondLook                    // a copy counts whatever the word says after it
	NoGeneration                    // a slot has the same word each time it is READY
	HitUnchecked                    // a reader believes the index, and looks at no header
	AckBeforeReady                  // a save is acknowledged before its last part is READY
	RankAlone                       // a save is acknowledged with its first part
	ReadyBeforeBytes                // the host makes a part READY, and copies then
	FillBeforeBytes                 // the plugin does
	AdoptUnchecked                  // the next life keeps headers whose check is wrong
	LentTwiceAccepted               // the host writes a slot that is another save's
	NoBarrier                       // the next life opens while the host writes for the former one
	NoFence                         // the next life opens while the former one still runs
	ResetUntold                     // the plugin is told about a reset, and the host's index stays
	ReplaceInPlace                  // a damaged block is written over where it is
	ReturnForgotten                 // a save that failed is not returned
	IndexDropped                    // the host forgets what is resident when the next life opens
	LifeStartsOver                  // the next life lays the arena out again, and counts generations from the start
	mutants
)

// careless says whether the mutant shows only with a plugin that ignores pins: readers are safe from that by
// generations and the second look alone.
func (m Mutant) careless() bool { return m == NoSecondLook || m == NoGeneration }

// String is the mutant as tests name it.
func (m Mutant) String() string {
	return [mutants]string{
		"sound", "look-before-pin", "retire-after-look", "retire-skipped", "pins-ignored", "pins-forgotten", "no-second-look",
		"no-generation", "hit-unchecked", "ack-before-ready", "rank-alone", "ready-before-bytes", "fill-before-bytes",
		"adopt-unchecked", "lent-twice-accepted", "no-barrier", "no-fence", "reset-untold", "replace-in-place", "return-forgotten",
		"index-dropped", "life-starts-over",
	}[m]
}
