package simulate

import (
	"errors"
	"slices"

	"github.com/kvport/kvport/connector"
)

// Mutant is a way to be wrong, taken from an incident of a serving system. It changes what the layer
// between the real parts does; the real parts are always as they are.
type Mutant uint8

// The mutants.
const (
	Sound Mutant = iota // no mutant
	FreeOnAbort
	FreeAtDeadline
	NoFence
	WriterForgotten
	NoDeadline
	OldAnswers
	DoubleFinish
	LostFinish
	NoDigest
	ErrorIsSuccess
	PartIsWhole
	RankIgnored
	PublishEarly
	AckBeforeSave
	RetryUnpinned
	RetryForever
	LaterForever
	DoubleUnpin
	FreeHeld
	HoldForever
	ResetLies
	ResetInHaste
	AcceptForged
	AcceptReplayed
	AcceptStale
	KeyOfBlockAlone
	DoubleLoaded
	DoubleRelease
	FailedUntold
	LostIsOver
	HoldOutlivesPlugin
	RenewalLost
	RenewalOfNone
	FirstConsumerFrees
	ResetHalf
	SlotsShared
	CheckThenCopy
	DigestOfCopy
	DigestWithoutKey
	DigestWithoutPlace
	PartialUnchecked
	TurnKept
	TurnLeased
	TurnUnchecked
	TurnNotWorth
	LayerEarly
	StoredFrees
	ResetUnheard
	ResetGone
	ResetUntold
	AbandonedIsReaped
	LostIsFree
	LostHoldUntold
	ReshapeOffByOne
	ReshapePart
	CutBeforeCheck
	EarlyIsStored
	ChildGoneEarly
	ChildFreedOnCancel
	ChildTicketsMixed
	ChildHoldConsumed
	TaintSigned
	TaintUntold
	TaintPart
	TaintForgotten
	TaintHeld
	ForeignBelieved
	ForeignDamaged
	ForeignKept
	OverlapUnchecked
	OverlapOneRank
	OverlapRetried
	OverlapEndUnchecked
	OverlapLayerEarly
	AloneUnchecked
	AloneAgain
	mutants
)

// MutantInfo says what a mutant does and where it was seen.
type MutantInfo struct {
	Mutant   Mutant
	Name     string
	Does     string
	Incident string
}

// Mutants lists them all.
func Mutants() []MutantInfo {
	return append([]MutantInfo{
		{FreeOnAbort, "free-on-abort", "a cancelled load is over at once, though the plugin still writes", "sglang#24527, vllm#32255, dynamo#826"},
		{FreeAtDeadline, "free-at-deadline", "pins are dropped when a deadline passes, not when the call is over", "vllm#55470"},
		{NoFence, "no-fence", "a dead plugin's blocks are reused before the process is reaped", "vllm#56104"},
		{WriterForgotten, "writer-forgotten", "a dead plugin's blocks are reused when the process is reaped, though a peer's call still writes into its memory", "measured: 111 ms and more of process_vm_writev (record 125, rule HOST-05)"},
		{NoDeadline, "no-deadline", "a call that never answers is waited for", "SGLang's 300 s, vllm#46283"},
		{OldAnswers, "no-generation", "the answer of a former generation counts for the present one", "vllm#53095"},
		{DoubleFinish, "duplicate-finish", "the end of a request is reported twice", "vllm#46240"},
		{LostFinish, "lost-finish", "the end of a request is not reported when the plugin is down", "vllm#46283"},
		{NoDigest, "no-digest", "loaded bytes are not checked", "vllm#52234"},
		{ErrorIsSuccess, "error-is-success", "a load that failed counts as done", "LMCache#4991, smg#2382"},
		{PartIsWhole, "part-is-whole", "blocks that did not arrive are overlooked", "vllm#49250"},
		{RankIgnored, "rank-ignored", "only rank 0 decides whether a load went well", "vllm#56104"},
		{PublishEarly, "publish-early", "a load counts as done when it begins", "Mooncake#4239"},
		{AckBeforeSave, "ack-before-save", "a save is over before the plugin has read its blocks", "vllm#21570"},
		{RetryUnpinned, "retry-unpinned", "calls are tried again after their pins are gone", "sglang#35049"},
		{RetryForever, "retry-for-ever", "a load that left nothing is offered again and again", "no denylist: vllm#49250"},
		{LaterForever, "later-for-ever", "a match stays unknown without a limit", "local-inference-lab/vllm#191"},
		{DoubleUnpin, "double-unpin", "the pins of a save are dropped twice", "vllm-ascend#15990"},
		{FreeHeld, "free-held", "held blocks are free at once", "vllm#21570"},
		{HoldForever, "hold-for-ever", "a hold whose time is over stays", "vllm#41269, vllm#58222"},
		{ResetLies, "reset-lies", "a reset is reported done and the store still serves", "vllm#57727"},
		{ResetInHaste, "reset-in-haste", "a reset does not wait for saves under way", "vllm#57727, vllm#42695"},
		{AcceptForged, "accept-forged", "the signature of a ticket is not checked", "vllm#52234, vllm#47843"},
		{AcceptReplayed, "accept-replayed", "a ticket can be used any number of times", "sglang#40125"},
		{AcceptStale, "accept-stale", "tickets of a producer's former life are taken", "vllm#49238"},
		{KeyOfBlockAlone, "key-of-block-alone", "a block's key says nothing about the blocks before it", "vllm#53194, lmdeploy#4930"},
		{DoubleLoaded, "duplicate-loaded", "the end of a load is reported twice", "rule HOST-01"},
		{DoubleRelease, "duplicate-release", "the end of a hold is reported twice", "rule HOST-01"},
		{FailedUntold, "failed-untold", "the engine is not told which blocks of a load failed", "vllm#49250"},
		{LostIsOver, "lost-is-over", "a call whose connection broke counts as over, though the process still writes", "rule HOST-05"},
		{HoldOutlivesPlugin, "hold-outlives-plugin", "the holds of a dead plugin stay", "vllm#41269"},
		{RenewalLost, "renewal-lost", "a renewal does not reach the hold, and the plugin vouches for it", "rule LEASE-02"},
		{RenewalOfNone, "renewal-of-none", "the plugin is not told which holds are over", "rule LEASE-02"},
		{FirstConsumerFrees, "first-consumer-frees", "a hold for several consumers ends with the first", "rule HOLD-03"},
		{ResetHalf, "reset-half", "a reset empties the store and leaves the engine's own prefix cache", "vllm#57727"},
		{SlotsShared, "slots-shared", "calls at the same time get the same slots of landing memory", "trust level staged"},
		{CheckThenCopy, "check-then-copy", "blocks are verified in landing memory, where the plugin still writes, and copied afterwards", "trust level staged"},
		{DigestOfCopy, "digest-of-copy", "digests are made of the copy in landing memory, where the plugin writes", "trust level staged"},
		{DigestWithoutKey, "digest-without-key", "a digest says what the bytes are, not of which block", "vllm#52234"},
		{DigestWithoutPlace, "digest-without-place", "a digest says nothing of group and rank", "vllm#56104"},
		{PartialUnchecked, "partial-unchecked", "partial blocks are not verified", "rule KEY-09"},
		{TurnKept, "turn-kept", "blocks are kept for a next turn that may never come", "rule TURN-01"},
		{TurnLeased, "turn-leased", "the ticket of an earlier turn says that its blocks are kept, and serves again and again", "rule TURN-03"},
		{TurnUnchecked, "turn-unchecked", "what an earlier turn left is loaded unverified, and was reused meanwhile", "vllm#32553"},
		{TurnNotWorth, "turn-not-worth", "an earlier turn is loaded, however little it brings", "vLLM's kv_recompute_threshold"},
		{LayerEarly, "layer-early", "a layer is announced before it is computed", "rule LAYER-03"},
		{StoredFrees, "stored-frees", "blocks are free when what a ticket promises is stored, and the save goes on", "rule MULTI-08"},
		{ResetUnheard, "reset-unheard", "a reset counts as done whatever the plugin answers", "vllm#57727"},
		{ResetGone, "reset-gone", "a reset counts as done when the plugin dies or the time is over", "vllm#57727"},
		{ResetUntold, "reset-untold", "nobody is told that a reset failed", "vllm#46283"},
		{AbandonedIsReaped, "abandoned-is-reaped", "a dead plugin's blocks are used again although somebody may write them for ever", "rule HOST-05"},
		{LostIsFree, "lost-is-free", "the engine takes blocks that are lost for free", "rule HOST-05"},
		{LostHoldUntold, "lost-hold-untold", "the engine is not told that the blocks of a hold are lost, and lets requests wait for them", "rule HOST-05"},
		{ReshapeOffByOne, "reshape-off-by-one", "source blocks are cut into ours one token too far", "rule RESHAPE-07"},
		{ReshapePart, "reshape-part", "a source block that did not come counts as cut", "rule RESHAPE-05"},
		{CutBeforeCheck, "cut-before-check", "source blocks are cut into ours before they are checked, and the plugin writes in between", "rule RESHAPE-07"},
		{EarlyIsStored, "early-is-stored", "a save counts as stored when the plugin answers before its blocks are computed", "rule LAYER-02"},
		{ChildGoneEarly, "child-gone-early", "the calls of a child that died return while something of it can still write", "rule MULTI-02"},
		{ChildFreedOnCancel, "child-freed-on-cancel", "a cancelled call of a child returns at once, though the child still writes", "rule WORK-04"},
		{ChildTicketsMixed, "child-tickets-mixed", "children are known by their place, so that another order at the other end mixes up their tickets", "rule MULTI-07"},
		{ChildHoldConsumed, "child-hold-consumed", "a hold that ends with a child's process counts as consumed", "rule MULTI-07"},
	}, slices.Concat(taintMutants(), foreignMutants(), overlapMutants(), aloneMutants())...)
}

func (w *World) is(m Mutant) bool { return w.opt.Mutant == m }

// overlooks is what wrong hosts make of the answer to a load. It reports whether the blocks count as
// they are.
func (h *host) overlooks(m *move) bool {
	var some *connector.BlockError
	named := errors.As(m.out.Err, &some)
	switch {
	case h.w.is(RankIgnored) && m.Rank > 0:
	case h.w.is(PartIsWhole) && named, h.w.is(ErrorIsSuccess) && m.out.Err != nil && !named:
	default:
		return h.w.is(NoDigest)
	}
	m.out.Err = nil
	return true
}

// forgetWriter is what a host does that takes the end of a process for the end of all writing into its memory.
func (h *host) forgetWriter(p *proc) {
	if h.w.is(WriterForgotten) && p.isDown && !p.isOver && !h.w.now.Before(p.overAt) {
		p.isOver = true
		h.do(h.tracker.Reaped(h.w.now, p.n))
	}
}
