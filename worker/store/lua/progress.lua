-- Show how far a running job is, if this execution still holds it.
-- ARGV: queue, job id, execution id, serialized meta
if holds(ARGV[1], ARGV[2], ARGV[3]) then
  call('HSET', 'rq:job:' .. ARGV[2], 'meta', ARGV[4])
  return 1
end
return 0
