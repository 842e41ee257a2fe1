package host

import "time"

// Settings are the host's own settings: the object "kvport" of the transfer config.
type Settings struct {
	TicketKeyFile    string   // key that signs tickets; empty: one shared by this user's engines on this machine
	Peers            []string // ids of the engines whose tickets are accepted; empty: all that have the key
	Trust            Trust
	LandingBytes     int    // staged: landing memory of each rank, in bytes
	ArenaLimit       int    // the most bytes that a connector may have as its arena; 0: what the machine has free
	PluginSHA256     string // the plugin binary must have this hash, in hex; empty: any
	TenantSecretFile string // makes digests and keys keyed MACs
	AllowLossy       bool   // accept a connector whose loaded bytes may differ from the saved ones
	Unverified       bool   // accept blocks of engines of other shapes, whose bytes no digest verifies
	Ring             bool   // small messages go through shared memory, if the plugin can; false: all over the stream
	AllowWeakHashes  bool   // agent: accept an engine whose block hashes could collide or differ between processes
	// RecomputeThreshold is how many tokens an earlier turn's blocks must hold to be loaded: fewer are computed.
	RecomputeThreshold int
	Deadlines          Deadlines
	Heartbeat          Heartbeat
	Breaker            Breaker
}

// Trust says what a plugin may touch.
type Trust string

// The levels.
const (
	TrustInPlace Trust = "in-place" // the plugin maps the paged cache
	TrustStaged  Trust = "staged"   // it maps landing memory: the host copies saves out and verified loads in
)

// Deadlines bound every call. None may be zero.
type Deadlines struct {
	Handshake      time.Duration // from start to the first answer
	Match          time.Duration // how long Match itself waits before it answers Later
	Later          time.Duration // how long a match may stay Later before it is a miss
	Transfer       time.Duration // a load, besides TransferPerGiB
	TransferPerGiB time.Duration
	Save           time.Duration
	Plan           time.Duration
	Finish         time.Duration // from the end of a request until its Finished
	Grace          time.Duration // from a passed deadline until the plugin is killed
	Hold           time.Duration // TTL of a hold that names none
	HoldMax        time.Duration // the longest TTL a plugin may ask for
	Fence          time.Duration // how long a dead plugin's blocks wait for those that may still write them, before they are lost
	Drain          time.Duration // how long Close waits for transfers
}

// Heartbeat says how a hung plugin is noticed.
type Heartbeat struct {
	Interval time.Duration
	Limit    time.Duration // a plugin that could have answered for so long and did not is killed; a busy machine stretches it up to four times
}

// Breaker says when a plugin that keeps dying is left alone.
type Breaker struct {
	Deaths     int
	Window     time.Duration
	Cooldown   time.Duration // then one start is tried
	BackoffMin time.Duration // wait before the first restart, doubled each time
	BackoffMax time.Duration
}

// DefaultSettings are the defaults of every setting: the one place that has them.
func DefaultSettings() Settings {
	return Settings{
		Trust: TrustInPlace, LandingBytes: 64 << 20, Ring: true, RecomputeThreshold: 64,
		Deadlines: Deadlines{
			Handshake:      5 * time.Second,
			Match:          200 * time.Microsecond,
			Later:          2 * time.Second,
			Transfer:       5 * time.Second,
			TransferPerGiB: time.Second,
			Save:           30 * time.Second,
			Plan:           2 * time.Second,
			Finish:         5 * time.Second,
			Grace:          500 * time.Millisecond,
			Hold:           30 * time.Second,
			HoldMax:        10 * time.Minute,
			Fence:          5 * time.Second,
			Drain:          10 * time.Second,
		},
		Heartbeat: Heartbeat{Interval: 250 * time.Millisecond, Limit: 2 * time.Second},
		Breaker: Breaker{
			Deaths: 5, Window: 30 * time.Second, Cooldown: 30 * time.Second,
			BackoffMin: 10 * time.Millisecond, BackoffMax: time.Second,
		},
	}
}

// Bounds that are not settings.
const (
	maxConfigBytes = 4 << 20                // of a transfer config
	maxCorruptKeys = 1 << 16                // damaged keys remembered until they are saved anew
	maxAsks        = 64                     // queries of one Match call
	matchFresh     = 250 * time.Millisecond // an answer may be used again this long
	firstRetry     = 5 * time.Millisecond   // after ErrBusy and Later, doubled each time
	slowestRetry   = 200 * time.Millisecond
	readerWait     = time.Second      // for the last events to be read
	missedEvery    = 10 * time.Second // a warning about matches that stayed undecided
	statsEvery     = time.Second      // a connector is asked for its numbers
	statsWait      = time.Second      // for them
)
